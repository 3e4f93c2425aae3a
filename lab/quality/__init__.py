"""How well each method trains with each side at its best: tuned on one text, judged on another, three seeds.

    python -m lab.quality run --minutes 60     # go on with the queue; any number may run at once, kill them at will
    python -m lab.quality status               # what is done, what is next
    python -m lab.quality report               # tables and pictures from lab/results/quality

The workers of a run are a batch in one process (`model`), their rounds are the library's own (`training`). A study
(`studies`) is one method on one machine; it walks over its settings until every neighbour of the best one is worse
(`search`), then the best one is trained with three new seeds. A run is a line in lab/results/quality/runs.jsonl.
"""
