"""Ranks on other hosts: an agent on the host starts the rank, joins the launcher, and relays messages.

:mod:`flyte_ddp.core.launch.engine` describes how to write a launcher for another engine.
"""
