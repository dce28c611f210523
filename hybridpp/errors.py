"""What hybridpp raises: every error says the rule, the values and the way out."""


class HybridppError(Exception):
    """Base class of every error that hybridpp raises on purpose."""


class ConfigError(HybridppError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class LaunchError(HybridppError, RuntimeError):
    """The processes of the job could not be brought together."""


class ScheduleError(HybridppError, ValueError):
    """A schedule that is incomplete, out of order or would deadlock."""


class PartitionError(HybridppError, RuntimeError):
    """A model that cannot be cut into the stages asked for."""


class DataError(HybridppError, ValueError):
    """A batch that cannot be used, or ranks that hold different batches."""


class PeerError(HybridppError, RuntimeError):
    """Another rank failed; its own message says why."""


class NonFiniteLossError(HybridppError, RuntimeError):
    """The criterion gave NaN or infinity."""


class DeadlockError(HybridppError, RuntimeError):
    """Every rank waits for another one."""


class NotBuiltError(HybridppError, AttributeError):
    """Something that scripts of this kind use and hybridpp does not offer yet."""


class CheckpointError(HybridppError, RuntimeError):
    """A folder of weights that cannot be written or does not fit the model."""
