"""One HTML page about a run, or several side by side: curves, where the time went, samples, checks, settings."""
