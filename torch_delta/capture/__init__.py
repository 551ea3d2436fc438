"""A live model -> the changed elements of the shards this rank owns.

`source` is the seam to `publish`: what a Publisher consumes. `capture` implements it for an optimizer and its model,
`tensorsource` for a walk over (name, tensor) pairs. Nothing is imported here: `import torch_delta.capture` is free.
"""
