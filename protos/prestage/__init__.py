"""The contract both sides share: the step protocol, the protos, the wire, the trace format.

Imports neither `orchestrator` nor `trainer_worker`.
"""
