"""What a tree of tiles touches, holds and moves at every level of memory."""
