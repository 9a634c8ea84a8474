"""The OpenAI-compatible API: routes, the bodies that they take, and what they answer.

``server`` runs it, ``app`` lists the routes, ``service`` is what they share. A completion goes from
``completions`` (or ``chat``) through ``protocol`` to ``generation``, and back through ``forms`` and
``streaming``.
"""
