"""Estimates of what a parallel layout takes: memory of a rank, bytes sent, time of a step.

No GPU and no Megatron is needed. Imports point upwards in this list:

- amounts.py, model.py, layout.py, gpus.py: what is estimated, as data;
- plans.py: the LinearPlan of each linear on a rank;
- memory.py, traffic.py, work.py: memory, bytes sent, and amounts of work, from those plans;
- rates.py: seconds for a unit of each kind of work, fitted to measurements on H200s;
- step.py: the time of a step;
- counted.py, costs.py, overhead.py, costs_text.py: what each technique of a recipe takes in one
  linear, its time, and both as text;
- fits.py, search.py: which layouts run, and all of them in the order of their speed;
- flags.py, huggingface.py, report.py, command.py: the command `python -m tools.choose_layout`.
"""
