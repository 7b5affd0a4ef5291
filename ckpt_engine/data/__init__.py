"""Where the data loaders and the random streams are: recorded at a fetch boundary, put back bit for bit.

Plain loop:

```python
position = attach(loader)                                  # once, before the first iter(loader)
for batch in loader:
    ...                                                    # at the top of the loop a batch was just fetched;
    snapshot = {"data": position.state(), "rng": rng.capture()}   # at its bottom we are at the fetch boundary

position = attach(loader)                                  # in the resumed process
report = position.load_state(snapshot["data"], rng=snapshot["rng"])
for batch in loader:                                       # goes on with the next batch
    ...
```
"""
