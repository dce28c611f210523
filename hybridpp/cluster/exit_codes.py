"""Exit codes of ``hybridpp run``, and of ranks that end themselves."""

FAILED = 1
"""A rank failed, or was killed; or the job was told to stop and has not saved since its last step."""
HANG = 75
"""The watchdog ended a job that made no progress. It is `EX_TEMPFAIL`: trying again may help."""
STOPPED = 143
"""The job was told to stop, and nothing is lost: start it again. It is that of a process that SIGTERM ended."""
