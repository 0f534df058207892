"""How fast a recipe trains, beside the same model and data in a plain loop and in other libraries.

workloads.py    what is trained: recipes with their flags, as a model, batches and a loss
contenders.py   who trains it: a plain loop, Accelerate, Lightning, Fabric, a loop tuned by hand, Lockstep
clock.py        what is measured between two steps
ceiling.py      what the device could do: its fastest matrix product, and the operations of a step
worker.py       one contender in a process of its own
results.py      the table, the JSON file and the plot
"""
