"""`python -m tests.golden.update` writes the golden texts anew; look at the difference before you keep it."""

from __future__ import annotations

from tests.golden.texts import FOLDER, MODELS, texts

if __name__ == "__main__":
    for old in (*FOLDER.glob("*.txt"), *FOLDER.glob("*.c")):
        old.unlink()
    for name in MODELS:
        for file, content in texts(name).items():
            (FOLDER / file).write_text(content)
