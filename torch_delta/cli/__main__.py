"""`python -m torch_delta.cli`, for where the installed script is not on the PATH."""

import sys

from torch_delta.cli import main

sys.exit(main())
