#!/usr/bin/env bash
# Complete a prompt with nothing but curl; the server is the first argument.
set -euo pipefail
curl --fail-with-body --silent --show-error "${1:-http://localhost:8000}/v1/completions" \
    -H 'Content-Type: application/json' \
    -d '{"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}'
echo
