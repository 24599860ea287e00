"""Skip connections: from the layer that stashes a tensor straight to the one that pops it."""

from lightning_distkit.core.pipeline.skip.layout import skip_layout as skip_layout
from lightning_distkit.core.pipeline.skip.layout import verify_skippables as verify_skippables
from lightning_distkit.core.pipeline.skip.namespace import Namespace as Namespace
from lightning_distkit.core.pipeline.skip.skippable import Skippable as Skippable
from lightning_distkit.core.pipeline.skip.skippable import isolate as isolate
from lightning_distkit.core.pipeline.skip.skippable import pop as pop
from lightning_distkit.core.pipeline.skip.skippable import skippable as skippable
from lightning_distkit.core.pipeline.skip.skippable import stash as stash
from lightning_distkit.core.pipeline.skip.tracker import SkipKey as SkipKey
from lightning_distkit.core.pipeline.skip.tracker import Tracker as Tracker
from lightning_distkit.core.pipeline.skip.tracker import carried as carried
