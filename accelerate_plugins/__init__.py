"""The techniques of ``lightning_distkit.core`` as plugins of Hugging Face Accelerate; imports nothing of Lightning."""
