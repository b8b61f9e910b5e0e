"""A model in fewer bytes: its parts are measured alone, a choice keeps to a budget, and other rows
check it.

Tables of a run, tables and products of a model folder, and products while a run trains are such
parts. They say what NE is with a choice of theirs. A budget of NE is kept by `search`, and one of
bytes by `knapsack`.
"""
