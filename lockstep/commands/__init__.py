"""The commands of `lockstep`, one file each; `run(words)` gets the words after it and returns the exit status."""
