"""Ranks on other hosts: an agent starts each there, joins the launcher, and is its proxy.

A launcher for another engine opens a rendezvous, has the engine call ``agent.run_agent`` once for each rank, where the
rank is to run, with the rank's ticket, and calls ``Rendezvous.run_ranks``; tests/helpers/agents.py is a short example.

- ``open_rendezvous`` gets the addresses at which the agents' hosts reach this one. Flyte's tasks know the engines that
  ``pods/profiles.ENGINES`` lists.
- An agent gets its ticket on stdin, which stays open: its end tells the agent that the engine has ended the task.
- An agent that lives starts its rank again when the launcher asks for that. ``RankInfo.device_type`` tells it whether a
  fork of torch will do.
- On RankEndedError the engine starts that agent again, up to ``launch``'s ``retries=`` times. ``check_engine`` raises
  UnreachableError when an agent will not come (again).
- The rendezvous closes before the engine waits for its agents or kills them: they end when the connection does.
- ``launch(work, *, retries=0, hosts_to_come=0)`` first waits for ``hosts_to_come`` hosts, as of a new cluster.
- ``RankInfo.local_rank`` counts among the GPUs that the agent's process sees.
"""
