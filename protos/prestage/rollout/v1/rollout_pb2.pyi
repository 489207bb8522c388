from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SegmentSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_SOURCE_UNSPECIFIED: _ClassVar[SegmentSource]
    SEGMENT_SOURCE_ASSISTANT: _ClassVar[SegmentSource]
    SEGMENT_SOURCE_ENVIRONMENT: _ClassVar[SegmentSource]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
SEGMENT_SOURCE_UNSPECIFIED: SegmentSource
SEGMENT_SOURCE_ASSISTANT: SegmentSource
SEGMENT_SOURCE_ENVIRONMENT: SegmentSource
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_FAILED: FinishReason

class TokenSegment(_message.Message):
    __slots__ = ("source", "tokens", "logprobs", "loss_mask", "routed_experts")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    source: SegmentSource
    tokens: bytes
    logprobs: bytes
    loss_mask: bytes
    routed_experts: bytes
    def __init__(self, source: _Optional[_Union[SegmentSource, str]] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., routed_experts: _Optional[bytes] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("group_id", "index", "segments", "reward", "dispatched_version", "completed_version", "finish_reason", "task", "moe_layers", "top_k")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DISPATCHED_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MOE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    index: int
    segments: _containers.RepeatedCompositeFieldContainer[TokenSegment]
    reward: float
    dispatched_version: int
    completed_version: int
    finish_reason: FinishReason
    task: str
    moe_layers: int
    top_k: int
    def __init__(self, group_id: _Optional[str] = ..., index: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[TokenSegment, _Mapping]]] = ..., reward: _Optional[float] = ..., dispatched_version: _Optional[int] = ..., completed_version: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., task: _Optional[str] = ..., moe_layers: _Optional[int] = ..., top_k: _Optional[int] = ...) -> None: ...

class OpenProducer(_message.Message):
    __slots__ = ("producer", "run_id")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    producer: str
    run_id: str
    def __init__(self, producer: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("offset", "trajectory", "more")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    trajectory: Trajectory
    more: bool
    def __init__(self, offset: _Optional[int] = ..., trajectory: _Optional[_Union[Trajectory, _Mapping]] = ..., more: bool = ...) -> None: ...

class SubmitTrajectoriesRequest(_message.Message):
    __slots__ = ("open", "submit")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    open: OpenProducer
    submit: Submit
    def __init__(self, open: _Optional[_Union[OpenProducer, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ...) -> None: ...

class ProducerOpened(_message.Message):
    __slots__ = ("next_offset", "window")
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    next_offset: int
    window: int
    def __init__(self, next_offset: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("offset", "accepted", "duplicate", "reason", "message", "verdict_lost")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_LOST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    accepted: bool
    duplicate: bool
    reason: str
    message: str
    verdict_lost: bool
    def __init__(self, offset: _Optional[int] = ..., accepted: bool = ..., duplicate: bool = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., verdict_lost: bool = ...) -> None: ...

class SubmitTrajectoriesResponse(_message.Message):
    __slots__ = ("opened", "ack")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    opened: ProducerOpened
    ack: Ack
    def __init__(self, opened: _Optional[_Union[ProducerOpened, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ...) -> None: ...

class WatchPolicyRequest(_message.Message):
    __slots__ = ("run_id", "after")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after: int
    def __init__(self, run_id: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class WatchPolicyResponse(_message.Message):
    __slots__ = ("policy_version", "cancel_groups", "finished", "cursor")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    CANCEL_GROUPS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    cancel_groups: _containers.RepeatedScalarFieldContainer[str]
    finished: bool
    cursor: int
    def __init__(self, policy_version: _Optional[int] = ..., cancel_groups: _Optional[_Iterable[str]] = ..., finished: bool = ..., cursor: _Optional[int] = ...) -> None: ...
