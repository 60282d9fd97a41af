"""`python -m shardopt`: the command, where its script is not on the path."""

from shardopt.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
