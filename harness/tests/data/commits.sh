#!/bin/sh
# usage: commits.sh DIR - a repository DIR/repo of 64 commits that ask to be bisected: the metric
# jumps at 50 (1e-6 -> 3e-4) and moves a little at 12 (1e-6 -> 1.6e-6), commits 30 to 35 do not
# build, in 44 to 49 every third measurement fails.
set -e
mkdir -p "$1/repo"
cd "$1/repo"
git init -q -b main .
{
    cat <<'X'
blob
mark :1
data <<END
#!/bin/sh
# prints the metric of this commit, a little different each time; status 1 when it is above 1e-4
echo x >>"$COUNT"
n=$(wc -l <"$COUNT")
sleep 0.02
awk -v n=$n -v m="$(cat metric)" \
    'BEGIN { m *= 1 + 0.01 * (n % 3 - 1); print m; exit m > 1e-4 }' && ok=0 || ok=1
if [ -e flaky ] && [ $((n % 3)) = 1 ]; then ok=1; fi
exit $ok
END

X
    for i in $(seq 1 64); do
        value=1e-6
        [ $i -ge 12 ] && value=1.6e-6
        [ $i -ge 50 ] && value=3e-4
        printf 'commit refs/heads/main\nmark :%d\n' $((i + 100))
        printf 'committer T <t@example.com> %d +0000\n' $((1700000000 + i))
        printf 'data <<END\nchange %d\nEND\n' $i
        [ $i -gt 1 ] && printf 'from :%d\n' $((i + 99)) || printf 'M 100755 :1 check\n'
        printf 'M 644 inline metric\ndata <<END\n%s\nEND\n' $value
        printf 'M 644 inline number\ndata <<END\n%d\nEND\n' $i
        [ $i = 30 ] && printf 'M 644 inline broken\ndata <<END\nx\nEND\n'
        [ $i = 36 ] && printf 'D broken\n'
        [ $i = 44 ] && printf 'M 644 inline flaky\ndata <<END\nx\nEND\n'
        [ $i = 50 ] && printf 'D flaky\n'
        printf '\n'
    done
} | git fast-import --quiet
git checkout -q main
