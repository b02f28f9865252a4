"""Files that hold models: reading, checking, converting and writing them."""
