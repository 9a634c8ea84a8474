"""The OpenAI-compatible API: routes, the bodies that they take, and what they answer.

``server`` runs it, ``app`` lists the routes, ``service`` is what they share. A route's file has its
body, too. ``chat`` and ``completions`` read theirs (``protocol`` is what both have) for
``generation``, which answers whole or through ``streaming``, in one of the ``forms``.
"""
