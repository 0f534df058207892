"""Two runs of one script, compared: interrupted and resumed, or on different numbers of ranks."""
