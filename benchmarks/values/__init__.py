"""What the values of single streams are worth, beside groups and beside no baseline at all.

`python -m benchmarks.values study` trains tiny models from the same number of samples by every method, and
`python -m benchmarks.values runs` measures the variance that the values save in real runs.
`python -m benchmarks.values features` measures whether the policy's state predicts rewards better than the text does.
"""
