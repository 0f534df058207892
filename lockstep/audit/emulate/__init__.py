"""The machine that a script expects, on the machine that is there: its GPUs, its launcher, the ranks it starts itself.

Emulation needs no probe, and no probe needs emulation: they share only `Patches` and the `Recorder`.
"""
