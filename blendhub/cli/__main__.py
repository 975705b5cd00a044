"""``python -m blendhub.cli``, where the script is not on the path."""

import sys

from blendhub.cli import main

sys.exit(main())
