"""What changes the engine's state: requests that come, admission, one step, results, preemption, aborts.

Knows all of `EngineState`. Does not know channels between processes: `manager/loop` calls it and sends what it returns.
"""
