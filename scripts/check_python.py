"""Say clearly that an interpreter is too old, before anything is installed; must itself run on any Python 3."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the point of this file
    sys.exit(
        "torch_delta needs Python 3.11 or newer; {} is {}.{}. Choose another one: make PYTHON=python3.12 ...".format(
            sys.executable, *sys.version_info[:2]
        )
    )
