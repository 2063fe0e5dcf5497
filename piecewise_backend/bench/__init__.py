"""Timing a model against its peers: outputs are checked first, and a wrong contender gets no time."""
