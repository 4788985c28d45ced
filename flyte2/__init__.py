"""The tasks for Flyte 2, by its SDK ``flyte``. See docs/flyte2.md.

``flyte run --local flyte2/training.py training --hp '{"epochs": 2}'`` trains on this machine.
"""

from flyte2.command_line import set_up_command

set_up_command()
