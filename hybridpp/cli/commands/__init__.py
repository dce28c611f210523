"""What each command of ``hybridpp`` takes, without torch: help, completion and wrong options are told at once.

To add a command: declare its arguments and examples in a module here (`simulate.py` is a short one), add it to the list
in ``hybridpp/cli/app.py``, and do its work in a module of ``hybridpp/cli/`` that ``Command.work`` names. That module is
imported when the command runs, so it may import anything. It gets the arguments, prints with ``output.show`` (strings,
and a ``TextTable`` for each table), shows what takes long with ``output.working`` or ``output.bytes_done``, and raises
errors of ``hybridpp.errors``. Exit codes: see ``hybridpp/cli/app.py``.
"""
