"""Is a compiled model right? Piece by piece, replay by replay, against eager."""
