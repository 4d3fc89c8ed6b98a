"""One HTML page of a run's metrics.jsonl, or of two runs. Needs neither Megatron nor a GPU.

Imports point upwards in this list:

- layers.py: the order of a model's layers, by their names;
- reading.py: metrics.jsonl as a Run;
- embedding.py: runs as the JSON that the page contains;
- page.py: the page, from page.html, page.css and the scripts (`SCRIPTS`, in their order);
- command.py: the command `python -m tools.report`.
"""
