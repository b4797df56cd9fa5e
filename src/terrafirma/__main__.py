"""``python -m terrafirma`` is ``terrafirma``."""

from terrafirma.cli import main

if __name__ == "__main__":
    main()
