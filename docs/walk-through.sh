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

# How often the next two look, twice a second: three minutes.
LOOKS=${LOOKS:-360}

# Waits until a job is final, and shows it. Fails if there is no such job, or it isn't final in time.
wait_for() {
    local shown
    for _ in $(seq "$LOOKS"); do
        shown=$(ask "$U/api/ai/jobs/$1")
        case $shown in
            *finishedAt*) echo "$shown"; return 0 ;;
            *NOT_FOUND* | *UNAUTHORIZED*) echo "$shown" >&2; return 1 ;;
        esac
        sleep 0.5
    done
    echo "The job $1 isn't final yet: $shown" >&2
    return 1
}

# Waits until a worker holds a job, and prints the number of its process. Fails if the job ends before, or none takes it.
holder() {
    local shown
    for _ in $(seq "$LOOKS"); do
        shown=$($AIJOBS job "$1" --json) || return 1
        case $shown in
            *'"lockedBy": "'*) echo "$shown" | sed -n 's/.*"lockedBy": *"[^~]*~[^~]*~[^~]*~\([0-9]*\)~.*/\1/p'; return 0 ;;
            *'"finishedAt": "'*) echo "The job $1 has ended: no worker holds it." >&2; return 1 ;;
        esac
        sleep 0.5
    done
    echo "No worker has taken the job $1 yet." >&2
    return 1
}

# The number of the embedded broker's process.
broker() { sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$INSTANCE/broker.json"; }
