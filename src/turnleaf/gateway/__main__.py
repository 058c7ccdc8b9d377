"""The worker program: `python -m turnleaf.gateway`, with its configuration on standard input."""

import os
import sys

# transformers greets whoever has no torch with a warning; a worker needs only its tokenizers.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from turnleaf.gateway._worker import main  # transformers reads that on import

sys.exit(main())
