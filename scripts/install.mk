# make install, uninstall: the program and all that it needs below PREFIX, for packagers in DESTDIR.
# A file is installed by one line of INSTALLED, and removed by the same line.
PREFIX   ?= /usr/local
DESTDIR  ?=
INTO     := $(DESTDIR)$(PREFIX)
SHARE    := $(INTO)/share/deltaproof
VERSION  := $(shell sed -n 's/.*DP_VERSION "\(.*\)".*/\1/p' ref/vocabulary/problem.h)
COMMANDS  = $(shell sed -n 's/^    {"\([a-z]*\)",.*/\1/p' harness/commands/main.c)
# Folders and files that are this program's alone; completions and pages of others lie beside them.
INSTALLED = $(INTO)/bin/deltaproof $(INTO)/include/deltaproof_subject.h \
    $(INTO)/lib/pkgconfig/deltaproof.pc $(SHARE) \
            $(INTO)/share/doc/deltaproof $(INTO)/share/bash-completion/completions/deltaproof \
            $(INTO)/share/zsh/site-functions/_deltaproof \
            $(INTO)/share/fish/vendor_completions.d/deltaproof.fish \
            $(INTO)/share/man/man1/deltaproof.1 $(COMMANDS:%=$(INTO)/share/man/man1/deltaproof-%.1)
put      := install -D -m 644

.PHONY: install uninstall
install: program               ## program, header, cases, reports, man pages, completion in PREFIX
	install -D -m 755 $(PROGRAM) $(INTO)/bin/deltaproof
	$(put) harness/deltaproof_subject.h $(INTO)/include/deltaproof_subject.h
	install -d $(SHARE) $(INTO)/lib/pkgconfig $(INTO)/share/doc/deltaproof $(INTO)/share/man/man1
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' scripts/deltaproof.pc.in \
	    >$(INTO)/lib/pkgconfig/deltaproof.pc
	rm -rf $(SHARE)/cases $(SHARE)/reports
	cp -r cases $(SHARE)/cases
	for f in $$(cd reports && find . -name '*.py' -o -name '*.schema.json' \
	    -o -path './page/templates/*'); do $(put) reports/$$f $(SHARE)/reports/$$f; done
	@! test -f $(BASE)/python || cp $(BASE)/python $(SHARE)/python
	$(put) -t $(INTO)/share/doc/deltaproof README.md LICENSE harness/subject/example_subject.c \
	    harness/subject/example_ranks.c
	$(put) scripts/completion/deltaproof.bash $(INTO)/share/bash-completion/completions/deltaproof
	$(put) scripts/completion/deltaproof.zsh $(INTO)/share/zsh/site-functions/_deltaproof
	$(put) scripts/completion/deltaproof.fish $(INTO)/share/fish/vendor_completions.d/deltaproof.fish
	@command -v help2man >/dev/null || echo "install: no man pages: help2man is not installed"
	@! command -v help2man >/dev/null || scripts/man $(PROGRAM) $(INTO)/share/man/man1 $(COMMANDS)

uninstall:                     ## remove what make install put below PREFIX
	rm -rf $(INSTALLED)
