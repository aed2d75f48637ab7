"""python -m bench.judge"""

from bench.judge.judge import main

if __name__ == "__main__":
    raise SystemExit(main())
