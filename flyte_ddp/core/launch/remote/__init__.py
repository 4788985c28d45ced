"""Ranks on other hosts: an agent on the host starts the rank, joins the launcher, and relays messages.

A launcher for another engine opens a rendezvous, and makes a ticket for each rank. The engine calls ``agent.run_agent``
once for each rank, with the ticket, on the host where the rank is to run. Then the launcher calls
``Rendezvous.run_ranks``. A short example is in tests/helpers/agents.py.

- ``open_rendezvous`` gets the addresses at which the agents' hosts reach this host.
- ``pods/profiles.ENGINES`` lists the engines of Flyte's tasks.
- An agent gets its ticket on stdin. The end of stdin shows the agent that the engine has ended the task.
- When the launcher requests a restart, a living agent starts its rank again.
- ``RankInfo.device_type`` decides whether an agent may fork a process with torch.
- After RankEndedError, the engine starts the agent again, up to ``retries`` times.
- ``check_engine`` raises UnreachableError when an agent will not come (again).
- Agents end when the connection ends. So the rendezvous closes before the engine waits for agents or kills agents.
- First, ``launch(work, *, retries=0, awaited_hosts=0)`` waits for ``awaited_hosts`` hosts, as of a new cluster.
- ``RankInfo.local_rank`` is the number of a GPU among the GPUs of the agent's process.
"""
