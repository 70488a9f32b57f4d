"""`python -m koila`: the command `koila`."""

import sys

from koila_command import main

sys.exit(main())
