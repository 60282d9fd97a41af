"""``python -m lab``."""

from lab.cli.app import main

raise SystemExit(main())
