"""From trained to released: judging a model against the champion, and the registry of versions and champions."""
