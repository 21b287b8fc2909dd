# What the steps of the walk-through use. Read it into your shell, in the project's folder: . docs/walk-through.sh

AIJOBS=${AIJOBS:-.venv/bin/aijobs}
INSTANCE=${AIJOBS_INSTANCE_PATH:-instance}

# Where `make run` answers.
U=$(sed -n 2p "$INSTANCE/up.pid")

# A token of the user `demo`, good for a day.
TOKEN=$($AIJOBS token --user demo)

NOTES='{"lang": "en", "source": {"id": "osmosis", "title": "Osmosis"}, "segments": [{"sid": "p1",
 "text": "Osmosis is the movement of water across a membrane. A solute is a substance that is dissolved in a liquid."}]}'

# curl as that user; the HTTP status on a line of its own.
ask() { curl -sS -w '%{http_code}\n' -H "Authorization: Bearer $TOKEN" -H 'Content-Type: application/json' "$@"; }

# The job's id out of an answer.
job_id() { sed -n 's/.*"jobId": *"\([^"]*\)".*/\1/p'; }

# A job that does what it is told: one JSON object an attempt. Prints its id.
synthetic() { "$(dirname "$AIJOBS")/python" docs/synthetic_job.py "$@"; }

# Waits until a job is final, and shows it.
wait_for() {
    until ask "$U/api/ai/jobs/$1" | grep -q finishedAt; do sleep 0.5; done
    ask "$U/api/ai/jobs/$1"
}

# Waits until a worker holds a job, and prints the number of its process.
holder() {
    until $AIJOBS job "$1" --json | grep -q lockedBy; do sleep 0.5; done
    $AIJOBS job "$1" --json | sed -n 's/.*"lockedBy": *"[^~]*~[^~]*~[^~]*~\([0-9]*\)~.*/\1/p'
}

# The number of the embedded broker's process.
broker() { sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$INSTANCE/broker.json"; }
