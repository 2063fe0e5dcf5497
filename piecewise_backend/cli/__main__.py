"""`python -m piecewise_backend.cli`."""

import sys

from piecewise_backend.cli import main

sys.exit(main())
