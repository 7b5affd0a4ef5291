"""Codecs: how the stored bytes of a piece are made from its bytes, losslessly, one file each."""
