"""Ranks on other hosts: an agent starts each there, joins the launcher, and is its proxy."""
