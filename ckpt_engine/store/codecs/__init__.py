"""How the stored bytes of a piece are made from its bytes without loss, one codec a file."""
