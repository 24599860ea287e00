"""The algorithms: plain torch and the standard library, no trainer."""
