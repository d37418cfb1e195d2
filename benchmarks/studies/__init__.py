"""The tables and pictures of docs/studies.md, from the rows in benchmarks/results.

    python -m benchmarks.studies values                   # values, critic, value_runs, value_features, staleness,
    python -m benchmarks.studies critic --plot study.png  # teacher or group_free

The studies are finished: these rows stay as they were measured.
"""
