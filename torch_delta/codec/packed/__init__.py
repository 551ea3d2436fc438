"""The steps of the `packed` encoding; `torch_delta.codec.encodings.packed` puts them together.

    classes.py   old exponents and their classes           reduced.py   changes ──▶ gaps and steps by class
    steps.py     values as steps                           pieces.py    boxes cut to fit a frame
    head.py      what a frame says of each slice           streams.py   directory, zstd
    emit.py      gaps and steps ──▶ streams                gather.py    streams ──▶ gaps and steps
    locate.py    gaps ──▶ positions in old bits            kernels*.py  compiled twins

The numpy code is the specification beside docs/format.md, rules E7 to E9.
"""
