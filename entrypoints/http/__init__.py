"""What any HTTP server needs: sockets and connections, keys and CORS, bodies, ids, errors.

Knows nothing of the routes, which are in ``entrypoints.openai``. A request comes in through
``connection``, passes the ``layers``, and its route reads it with ``request_body``.
"""
