# SPDX-License-Identifier: MIT
"""Prints what TensorBoard reads from the event files of a folder, as JSON: for scripts/bench/run."""
import json
import sys

import tensorboard
from tensorboard.backend.event_processing import event_accumulator

everything = {kind: 0 for kind in event_accumulator.DEFAULT_SIZE_GUIDANCE}
events = event_accumulator.EventAccumulator(sys.argv[1], size_guidance=everything)
events.Reload()
tags = events.Tags()
json.dump({
    "version": tensorboard.__version__,
    "scalars": {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags["scalars"]},
    "images": tags["images"],
    "histograms": tags["histograms"],
    "texts": tags["tensors"],
}, sys.stdout)
