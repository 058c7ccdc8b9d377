"""The worker program: `python -m turnleaf.gateway`, with its configuration on standard input."""

import sys

from turnleaf.gateway._worker import main

sys.exit(main())
