"""Whether a machine is ready to train, and what to do where it is not: `lockstep doctor`.

    check.py         a result: green, yellow or red, what was found, and the remedy
    versions.py      Python, torch, CUDA, driver, NCCL, and whether they fit together
    gpus.py          memory, other processes, errors, peer access
    machine.py       cores, memory, shared memory, open files, disk, ports, host name
    environment.py   environment variables that do nothing, or do harm
    ranks.py         an all-reduce between real ranks of this machine
    workload.py      with a recipe: does it fit, and what limits its speed
    hosts.py         between machines: ports, latency, bandwidth, clocks, versions

Each file reads facts into a dataclass, and judges them in small functions that take nothing else: a test gives them any
machine. docs/troubleshooting.md goes from symptoms to these checks.
"""
